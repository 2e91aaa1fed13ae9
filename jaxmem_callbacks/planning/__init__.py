"""A train step and a target enter; which policies were compiled, what each needs and costs, and the one to use leave."""
