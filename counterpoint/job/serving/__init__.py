"""What a job serves: the page, `counterpoint serve`, as a worker of it, and what the service for the Tinker SDK has done.

The servers themselves are the packages `serve` and `service`.
"""
