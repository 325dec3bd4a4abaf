"""The `zinf` command, one file per subcommand."""
