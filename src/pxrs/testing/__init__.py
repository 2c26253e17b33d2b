"""For users and for writers of backends: conformance suites and a virtual clock."""
