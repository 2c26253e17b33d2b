"""All stores in one process's memory: the simple reference for the other engines."""
