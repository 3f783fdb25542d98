"""Updates of parameters in the runners, with an optimizer of the host."""
