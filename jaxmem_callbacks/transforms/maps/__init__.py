"""Maps along one dimension: what is known of equations, the proof, and the evaluation at some positions."""
