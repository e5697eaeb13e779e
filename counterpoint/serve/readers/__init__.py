"""What the endpoints read from the directories of jobs: incremental, in bounded memory."""
