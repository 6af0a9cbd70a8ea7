"""`python -m services.lifecycle`."""

from services.lifecycle.app import run

if __name__ == "__main__":
    run()
