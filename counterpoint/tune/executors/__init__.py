"""Where trials run: processes of this machine, Ray, or runs of a live job."""
