"""Guards, each with the test that fails when the guard is removed (`make mutants`)."""
