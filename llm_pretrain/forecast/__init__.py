"""What training will take and reach: simulated steps, ladders of small models, plans."""
