"""What is in the files: sources, formats, and records read one by one."""
