"""What goes into an archive: its tables, and the file itself."""
