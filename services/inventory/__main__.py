"""`python -m services.inventory`."""

from services.inventory.app import run

if __name__ == "__main__":
    run()
