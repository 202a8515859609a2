"""Web sites on loopback: the demo site (`books`), and sites of any size for tests and benchmarks (`site`)."""
