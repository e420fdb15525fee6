"""The ops of dustin_compile, one a file. Import them from their files: a function named like its module is not re-exported."""
