"""What happens between the shell and a script's main()."""
