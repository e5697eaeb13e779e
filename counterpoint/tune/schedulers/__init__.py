"""When a trial stops, pauses, goes on, or takes another's state. Pure: results in, decisions out."""
