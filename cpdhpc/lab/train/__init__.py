"""Jobs of training on many ranks; what a job file may say is known without torch."""
