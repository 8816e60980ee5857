"""Pages for people who look in with a browser, and the files that they load."""
