"""All stores in one process's memory: the dumb twin that the other engines are judged by."""
