"""Reports of results: tables and trees that fit 80 columns and read the same without colour."""
