"""What every other part may use: late imports, texts of messages, types, indices, names of other libraries."""
