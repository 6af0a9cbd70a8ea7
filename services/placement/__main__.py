"""`python -m services.placement`."""

from services.placement.app import run

if __name__ == "__main__":
    run()
