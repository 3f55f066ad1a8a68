"""Questions about many hosts, answered in virtual time."""
