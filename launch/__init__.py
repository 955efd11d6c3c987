"""What stands between the shell and a script's main()."""
