"""The steps between the shell and a script's main()."""
