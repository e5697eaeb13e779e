"""The commands that steer a live job, over the functions of `job/admin/`."""
