"""For users and for writers of backends: suites, a virtual clock, faults and a simulator."""
