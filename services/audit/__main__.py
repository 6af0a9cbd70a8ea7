"""`python -m services.audit`."""

from services.audit.app import run

if __name__ == "__main__":
    run()
