"""One answer to which files of a folder or a pattern are data: their format, their split, and what is left out."""
