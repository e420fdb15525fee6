"""The ops, one a file. Import them from their files: re-exporting a function named like its module would shadow it."""
