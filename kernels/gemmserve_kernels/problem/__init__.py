"""Problems: what is to be computed, and the words and checks of its description; no device."""
