"""The agent of a joined worker: it plays the front for one ordinary worker on a node, and brings bytes both ways."""
