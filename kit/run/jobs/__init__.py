"""What a rank can be asked to do; one module a job."""
