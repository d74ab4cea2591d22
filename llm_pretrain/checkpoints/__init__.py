"""Full-precision checkpoints, from which training resumes bit for bit, and half-precision weights."""
