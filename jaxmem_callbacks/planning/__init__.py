"""Plans: the policies of a train step that were compiled for a target, what each needs and costs, and the one to use."""
