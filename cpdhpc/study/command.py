def report(files, png, html):
    print(files)
