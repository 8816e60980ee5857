"""Workers on other hosts, kept by Ray: the bridge (a child of the supervisor's), its decisions, and the actors."""
