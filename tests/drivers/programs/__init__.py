"""One program per framework: ``main`` runs all its cases and writes their results."""
