from tools.monitoring import main

main()
