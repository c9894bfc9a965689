// Browsers start no worker from a page that is a file. There the search runs in a hidden frame in its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc =
        "<script>window.postMessage = data => parent.postMessage(data, '*')</script>" + `<script src="${url}"></script>`;
      this.ready = new Promise(resolve => this.frame.addEventListener("load", resolve));
      addEventListener("message", event => {
        if (event.source === this.frame.contentWindow) this.dispatchEvent(new MessageEvent("message", {data: event.data}));
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
}
