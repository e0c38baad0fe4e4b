"""A Triton backend named `cpu` that compiles nothing: enough for runner V2 to run, under Triton's interpreter."""
