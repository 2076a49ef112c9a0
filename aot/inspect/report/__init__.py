"""What the page of `aot report` shows, as plain data: an archive in numbers. Knows nothing of HTML."""
