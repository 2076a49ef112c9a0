"""What an archive holds, as plain data that the command line prints. Needs no GPU and changes nothing."""
