"""The endpoints of `/api/v1`, a file for each resource."""
