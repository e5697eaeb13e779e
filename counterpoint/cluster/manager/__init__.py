"""The pure state machine of a job: every decision of the controller, by events in and instructions out."""
