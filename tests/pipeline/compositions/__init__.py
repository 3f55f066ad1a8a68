"""Random compositions of all stages: states that are restored exactly, or refused with the name of a stage."""
