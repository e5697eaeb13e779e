"""Files that run a job under another scheduler: a Slurm batch script, a Kubernetes JobSet, a KubeRay RayJob."""
