"""The device side. Imports Triton: nothing outside `ops`, `compiling` and the tests imports this at module level."""
