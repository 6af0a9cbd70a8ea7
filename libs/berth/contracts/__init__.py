"""What the parts of Berth say to each other: envelope, subjects, events, commands, requests and API models.

Pydantic models and plain functions only. Nothing here decides, stores or sends.
"""
