"""The command line: one thin file per command that parses, calls the public functions and prints."""
