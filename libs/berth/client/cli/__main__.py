"""`python -m berth.client.cli`."""

from berth.client.cli.main import main

if __name__ == "__main__":
    main()
