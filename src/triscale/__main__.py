from triscale.cli.main import main

main()
