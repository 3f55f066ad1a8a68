"""Many hosts and a bucket in one process and in virtual time, with the code of granular as it is."""
