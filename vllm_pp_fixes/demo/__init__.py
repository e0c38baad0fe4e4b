"""The real engine in small: what the demo, the tests and the benchmarks share. Nothing in here runs inside a server."""
